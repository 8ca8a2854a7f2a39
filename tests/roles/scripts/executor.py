"""A user's file of an unlucky name: Dike must never import it."""

raise RuntimeError("the user's executor.py was imported")
