def install(sink):
    pass
