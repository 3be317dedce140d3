"""Reports: a plan comes in; tables, pictures and JSON go out."""
