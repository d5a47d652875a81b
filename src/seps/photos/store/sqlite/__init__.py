"""A store's table in SQLite, for stores of one vector per picture: it needs the standard library alone."""
