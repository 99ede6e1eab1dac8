"""The checks of ``gmeta doctor``: of the installation, and of a checkpoint's tables on this machine."""

__all__: list[str] = []
