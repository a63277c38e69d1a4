"""Tables of any trace, annotated or not: what `labkit trace` shows, as frames whose column names end in their units."""
