"""Cases, ground truth, one worker for each library, judgement and tables of the benchmark beside other libraries."""
