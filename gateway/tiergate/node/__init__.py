"""The parent process: takes the memory folder and the ports, starts, restarts and stops the node's
processes."""

from tiergate.node.folder import FolderBusyError, StartError, folder_faults
from tiergate.node.serve import package_faults, serve
from tiergate.node.supervisor import Entries, NodeFailedError, RestartPolicy

__all__ = [
    "Entries",
    "FolderBusyError",
    "NodeFailedError",
    "RestartPolicy",
    "StartError",
    "folder_faults",
    "package_faults",
    "serve",
]
