"""Every error a user can meet, and the exit code it ends a command with.

    PotluckError                     1   something the user can mend
    ├── RecipeError                  3   the recipe does not say a run that can be made
    ├── DataError                    4   data missing, empty or unreadable
    ├── ResourceError                5   too little memory or disk
    ├── AddressError                 6   a port in use, an address that does not resolve
    ├── CoordinatorUnreachable       7   no coordinator answers at the address
    ├── Refused                      8   the other side said no, with its reason
    │   ├── NotAdmitted              8   token, certificate or role not accepted
    │   ├── VersionMismatch          9   another major protocol version
    │   ├── OwnerRefused             8   the policy of a machine's owner does not allow it
    │   ├── InvalidUpdate            8   tensors that are not finite, too large or not this model's
    │   ├── StateMissing             8   a worker has not what its next task goes on from
    │   └── PrivacySpent             8   a step would exceed the privacy that a run may cost its owner
    ├── CorruptError                10   a file or transfer that does not match its digest
    ├── RunStopped                  11   a run ended early, with the reason
    └── ModelError                  12   a model that cannot be built, loaded or held
        └── NotFinite               12   a loss or gradient that is NaN or infinite
    ConnectionLost                   -   internal: the link broke; always caught and retried
    RoundFailed                      -   internal: the round is discarded; the loop goes on
    └── UnusableUpdates              -   internal: accepted updates that cannot be made one, now or later

A message says subject, measured value, limit and remedy, in one sentence. A `PotluckError` that reaches the
command line prints that sentence and no traceback; anything else is our mistake and prints a traceback.
"""


class PotluckError(Exception):
    """Something the user can mend. `str(error)` is the one sentence to show."""

    exit_code = 1


class RecipeError(PotluckError):
    exit_code = 3


class DataError(PotluckError):
    exit_code = 4


class ResourceError(PotluckError):
    exit_code = 5


class AddressError(PotluckError):
    exit_code = 6


class CoordinatorUnreachable(PotluckError):
    exit_code = 7


class Refused(PotluckError):
    exit_code = 8


class NotAdmitted(Refused):
    exit_code = 8


class VersionMismatch(Refused):
    exit_code = 9


class OwnerRefused(Refused):
    exit_code = 8


class InvalidUpdate(Refused):
    exit_code = 8


class StateMissing(Refused):
    exit_code = 8


class PrivacySpent(Refused):
    exit_code = 8


class CorruptError(PotluckError):
    exit_code = 10


class RunStopped(PotluckError):
    exit_code = 11


class ModelError(PotluckError):
    exit_code = 12


class NotFinite(ModelError):
    exit_code = 12


class ConnectionLost(Exception):
    """The link to the other side broke. Whoever holds the link retries with back-off."""


class RoundFailed(Exception):
    """The round cannot be committed. `str(error)` is the reason; the state stays as it was."""


class UnusableUpdates(RoundFailed):
    """The updates that the round took cannot be made one, however often it is tried."""
