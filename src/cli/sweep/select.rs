//! Selects and sorts the points of a sweep to show, and finds the best ones.

use super::points::{Numbers, Point};
use crate::analysis::pareto::{self, Tolerance};
use shardlab_plan::units::Bytes;

/// Order of the points.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// Order of the axes
    Axes,
    /// Shortest step first
    Step,
    /// Highest throughput first
    Tokens,
    /// Least exposed communication first
    Exposed,
    /// Least allocated memory first
    Allocated,
    /// Least reserved memory first
    Reserved,
}

/// Requested selection of points.
pub(super) struct Selection {
    pub(super) sort: Sort,
    /// Only points that fit the device.
    pub(super) fits: bool,
    /// Only points that reserve at most this much memory.
    pub(super) max_memory: Option<Bytes>,
    /// Requested share of the device's memory (0 to 1) that a fitting point leaves free.
    pub(super) headroom: Option<f64>,
    /// Times and amounts of memory with a smaller relative difference count as equal.
    pub(super) tolerance: Tolerance,
    /// Only the first N points. If any point fits, only points that fit count.
    pub(super) top: Option<usize>,
    /// Whether points that do not fit also count for `top`.
    pub(super) all: bool,
}

impl Selection {
    /// Returns whether points may be left out.
    fn is_partial(&self) -> bool {
        self.fits || self.max_memory.is_some() || self.top.is_some()
    }

    fn within_limit(&self, n: &Numbers) -> bool {
        self.max_memory.is_none_or(|most| n.reserved <= most.0)
    }

    /// Returns the indices of all points in order. Points without numbers come last, except in the
    /// order of the axes.
    pub(super) fn sorted(&self, points: &[Point]) -> Vec<usize> {
        let key = |i: &usize| {
            points[*i]
                .done()
                .map_or(f64::INFINITY, |n| match self.sort {
                    Sort::Axes => 0.0,
                    Sort::Step => n.step_ms,
                    Sort::Tokens => -n.tokens_per_s,
                    Sort::Exposed => n.exposed_ms,
                    Sort::Allocated => n.allocated as f64,
                    Sort::Reserved => n.reserved as f64,
                })
        };
        let mut order: Vec<usize> = (0..points.len()).collect();
        if self.sort != Sort::Axes {
            order.sort_by(|a, b| key(a).total_cmp(&key(b)));
        }
        order
    }

    /// Returns the requested indices from `sorted`. Points without numbers are included only if all
    /// points are requested.
    pub(super) fn shown(&self, points: &[Point], sorted: &[usize]) -> Vec<usize> {
        if !self.is_partial() {
            return sorted.to_vec();
        }
        let admitted = |n: &Numbers| (!self.fits || n.fits()) && self.within_limit(n);
        let all = sorted.iter().copied();
        let mut shown: Vec<usize> = all
            .filter(|i| points[*i].done().is_some_and(admitted))
            .collect();
        if let Some(most) = self.top {
            let fits = |i: &usize| points[*i].done().is_some_and(Numbers::fits);
            if !self.all && shown.iter().any(fits) {
                shown.retain(fits);
            }
            shown.truncate(most);
        }
        shown
    }

    /// Returns whether any point fits and stays within the limit.
    pub(super) fn any_fits(&self, points: &[Point]) -> bool {
        let mut done = points.iter().filter_map(Point::done);
        done.any(|n| n.fits() && self.within_limit(n))
    }

    /// Returns the number of points that `top` leaves out because they do not fit.
    pub(super) fn unfit_left_out(&self, points: &[Point]) -> usize {
        if self.top.is_none() || self.all || self.fits || !self.any_fits(points) {
            return 0;
        }
        let done = points.iter().filter_map(Point::done);
        done.filter(|n| !n.fits() && self.within_limit(n)).count()
    }

    /// Returns the points that compete for the best and the front. They fit (if `easily` is set,
    /// without being tight) and stay within the limit.
    pub(super) fn contest(&self, points: &[Point], easily: bool) -> Vec<pareto::Point> {
        let admitted = |n: &&Numbers| n.fits() && !(easily && n.is_tight()) && self.within_limit(n);
        points
            .iter()
            .map(|point| match point.done().filter(admitted) {
                Some(n) => pareto::Point {
                    // Time per token makes points with different batches comparable.
                    time: 1.0 / n.tokens_per_s,
                    memory: n.reserved as f64,
                    changes: point.changes,
                },
                None => pareto::Point::OUT,
            })
            .collect()
    }
}
