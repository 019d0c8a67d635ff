"""Names that both ends of a connection must agree on."""

SERVER_NAME = "coordinator.potluck"
"""The name in every coordinator certificate. Workers check it instead of the address, which may change."""

ENROL_METHOD = "Enrol"
SERVICE_NAME = "potluck.v1.Potluck"
