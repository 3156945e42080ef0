"""Plans that copy, in simulated texts: a world of rows that repeat themselves, and how well the estimator plays it."""
