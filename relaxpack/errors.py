"""Every error a user can meet, with its exit code.

    RelaxpackError (1)
    ├── UsageError (2)            an option or argument makes no sense
    ├── CheckpointError (3)       a checkpoint is missing, damaged or unsupported
    │   ├── ConfigError           a config value is unknown, contradictory or unsupported
    │   └── TokenizerError        tokenizer or chat template is missing or broken
    ├── CompileError (4)          building failed
    ├── BundleError (5)           a bundle is damaged, newer, or not a bundle
    │   ├── NotABundleError       the path holds something else
    │   ├── NewerFormatError      written by a newer relaxpack
    │   ├── DamagedMemberError    a member's size, digest or content is wrong
    │   ├── MissingMemberError    a member the manifest names is not there
    │   ├── UnsafeMemberError     a member's name or kind could reach outside the bundle
    │   └── TargetMismatchError   the bundle is for another machine
    ├── EnvironmentProblem (6)    a library or device is missing or of the wrong version
    ├── RequestError (7)          a generation request is invalid (HTTP 400)
    └── TuningError (8)           tuning, or the database of its records, failed
        ├── DamagedRecordError    a tuning record has a wrong field or digest
        ├── DatabaseError         a store or exchange place cannot be reached, or is none
        └── NewerDatabaseError    written by a newer relaxpack

Messages say what is wrong, what was given, and what to do next. The CLI prints them as one line and exits with
`exit_code`; anything else that escapes is a bug and shows a traceback.
"""

from __future__ import annotations


class RelaxpackError(Exception):
    """Base of all errors meant for a user."""

    exit_code = 1


class UsageError(RelaxpackError):
    exit_code = 2


class CheckpointError(RelaxpackError):
    exit_code = 3


class ConfigError(CheckpointError):
    pass


class TokenizerError(CheckpointError):
    pass


class CompileError(RelaxpackError):
    exit_code = 4


class BundleError(RelaxpackError):
    exit_code = 5


class NotABundleError(BundleError):
    pass


class NewerFormatError(BundleError):
    pass


class DamagedMemberError(BundleError):
    pass


class MissingMemberError(BundleError):
    pass


class UnsafeMemberError(BundleError):
    pass


class TargetMismatchError(BundleError):
    pass


class DestinationError(BundleError):
    """A bundle must not be written where it was asked for; nothing is wrong with any bundle."""

    exit_code = UsageError.exit_code


class EnvironmentProblem(RelaxpackError):
    exit_code = 6


class RequestError(RelaxpackError):
    """`param` names the offending field in OpenAI's error shape."""

    exit_code = 7

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TuningError(RelaxpackError):
    exit_code = 8


class DamagedRecordError(TuningError):
    pass


class DatabaseError(TuningError):
    pass


class NewerDatabaseError(TuningError):
    pass
