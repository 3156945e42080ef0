"""Off-policy evaluation of finished outputs: the steps that every arm would have taken."""
