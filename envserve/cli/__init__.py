"""The commands of `envserve`, each in the module of the same name; `app` lists them.

Modules that are slow to import are imported inside functions, so that a command imports
only the modules that it needs.
"""
