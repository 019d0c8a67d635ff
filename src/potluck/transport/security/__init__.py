"""Who may join: the coordinator's authority, join lines, enrolment, certificates and their revocation."""
