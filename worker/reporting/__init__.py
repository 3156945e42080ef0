"""Reports to the controller, and the table of arms that comes back."""
