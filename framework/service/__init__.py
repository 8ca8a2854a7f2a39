"""The service: its database, its users, the REST API and the web page."""
