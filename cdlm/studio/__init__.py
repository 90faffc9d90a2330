"""The studio: a web page that shows samples resolving, and the HTTP API beneath it (`cdlm studio MODEL...`)."""
