"""One framework for many jobs: seats, the queue for offers, what is kept in the database, and the service around it."""
