"""What serving runs showed: statistics, tables, pictures."""
