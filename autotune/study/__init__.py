"""The search: what is tried next and by whom, kept on a storage that many processes and machines may share."""
