//! The program as stable text.

use super::{BufferId, Program};

pub(super) fn buffer_name(_program: &Program, id: BufferId) -> String {
    format!("b{}", id.0)
}

pub(super) fn render(_program: &Program) -> String {
    String::new()
}
