"""The worker's link to the controller: steps are reported; tables of arms and probes come back."""
