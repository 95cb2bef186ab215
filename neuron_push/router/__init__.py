"""A small P/D router: both legs of a request at once, identities, health.

Importing this package (and `options`) needs the standard library only; `app`
and `server` need the `router` extra.
"""
