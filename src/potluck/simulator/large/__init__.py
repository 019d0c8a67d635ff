"""Thousands of machines and big models: the shipping hosts without the values, transfers and computing modelled."""
