"""A store's table in Lance: any size of pictures, an approximate index, object storage."""
