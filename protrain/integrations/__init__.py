"""Training libraries that train with ProTrain by one line. Each module imports its library, so import what you use."""
