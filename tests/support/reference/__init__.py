"""The algorithms of gmeta's ops and tables in plain NumPy, as references for tests and documents."""
