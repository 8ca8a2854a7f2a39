"""The service's REST API: `app.py` lists the routes, `front.py` serves them."""
