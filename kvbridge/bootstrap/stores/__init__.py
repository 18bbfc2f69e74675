"""Where the directory and the rooms of bootstrap are kept: in one process, or shared by several replicas."""
