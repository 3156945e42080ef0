"""What a worker tells the controller, and the table of lengths it gets back."""
