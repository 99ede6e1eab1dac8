"""The algorithms of gmeta's ops and tables in plain NumPy, as tests and documents compare with them."""
