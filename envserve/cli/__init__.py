"""The commands of `envserve`, each in the module of its name; `app` lists them.

Slow imports stand inside functions, so that a command loads only what it runs.
"""
