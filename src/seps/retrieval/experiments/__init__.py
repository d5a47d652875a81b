"""Comparisons and ablations over several seeds; nothing else imports this package."""
