"""The service's REST API: `app.py` lists its routes, `front.py` serves it."""
