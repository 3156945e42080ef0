"""Messages of the protocol: checked, read into the estimator's values, written."""
