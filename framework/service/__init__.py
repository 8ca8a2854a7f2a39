"""The service: what is kept of jobs in the database, who may ask for what, and the pages and the REST API."""
