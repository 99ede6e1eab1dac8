"""What tests share: made-up data, reference implementations, processes and machines to run on."""
