//! The whole dashboard: screens of every view, and what scripts of events lead to.

mod scripts;
mod views;
