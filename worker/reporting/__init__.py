"""Reports to the controller, and its table of arms."""
