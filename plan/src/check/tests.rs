//! Every rule: a good program passes, a planted bug is named.

mod good;
