"""Learns how many tokens to speculate at each batch size. Never imports torch."""
