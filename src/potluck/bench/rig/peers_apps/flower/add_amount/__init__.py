"""Federated averaging in Flower, of clients that add a constant."""
