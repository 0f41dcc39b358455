//! Tests of the whole dashboard: screens of every view, and the results of scripts of events.

mod scripts;
mod views;
