"""Channel between launcher, controller and agents (group ``control``)."""

from dataclasses import dataclass


@dataclass
class ControlConfig:
    """Control channel, through which launcher, controller and agents communicate."""

    interface: str = "127.0.0.1"
    """Address that the control channel binds to; never all interfaces. With ``launch.node_launcher=srun`` and ``none``
    it may be the name of a network interface of the batch host. Mode ``local``."""
    tls_dir: str | None = None
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``. The control channel is then encrypted, and both sides
    present a certificate of that authority. null sends plain text. Mode ``local``."""
