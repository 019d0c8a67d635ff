"""The contract every strategy keeps, as checks that run on a strategy of your own too (`potluck test FILE`)."""
