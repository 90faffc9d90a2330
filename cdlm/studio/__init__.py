"""A page where one watches text resolve, and the HTTP service beneath it: `cdlm studio MODEL...`."""
