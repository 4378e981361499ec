"""Channel between launcher, controller and agents (group ``control``)."""

from dataclasses import dataclass


@dataclass
class ControlConfig:
    """Address and encryption of the control channel, over which launcher, controller and agents communicate."""

    interface: str = "127.0.0.1"
    """Address on which the control channel listens; never all interfaces. With ``launch.node_launcher=srun`` or
    ``none`` it may also be the name of a network interface of the batch host. Only in mode ``local``."""
    tls_dir: str | None = None
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``. The control channel is then encrypted with TLS, and both
    sides must present a certificate that this CA has signed. null sends plain text. Only in mode ``local``."""
