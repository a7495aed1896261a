"""Views only draw: each takes a value of the model and gives text, HTML or a figure."""
