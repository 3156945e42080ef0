"""The controller and the store under load."""
