"""All that a notebook needs in one call: measurements, captures, and the frames made of them."""
