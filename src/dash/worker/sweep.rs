//! Predicts a sweep and reports every point as soon as it is ready.

use super::predict::shown_error;
use super::{Ended, Reporter, Stop};
use crate::dash::event::{News, Setup};
use crate::dash::glance::Brief;
use crate::predict::{Profiles, predict_light};
use rayon::prelude::*;
use shardlab_plan::scenario::sweep_of;

pub(super) fn sweep(
    setup: &Setup,
    axes: &[String],
    profiles: &Profiles,
    reporter: &Reporter,
    stop: &Stop,
) -> Result<Ended, String> {
    let sweep = sweep_of(&setup.path, &setup.overrides, axes).map_err(|e| shown_error(&e))?;
    if sweep.axes.is_empty() {
        return Err("no axis: a adds one, as in fsdp.prefetch_forward=[0, 1, 2]".into());
    }
    let keys = sweep.keys().map(str::to_owned).collect();
    reporter.say(News::Axes(keys, sweep.points.len()));
    sweep
        .points
        .into_par_iter()
        .enumerate()
        .for_each(|(index, point)| {
            if stop.asked() {
                return;
            }
            let settings = point.settings.into_iter().map(|(_, value)| value).collect();
            let result = point
                .scenario
                .map_err(|e| e.message().to_owned())
                .and_then(|scenario| predict_light(&scenario, profiles).map_err(|e| e.reason()))
                .map(|p| Brief::of(&p));
            reporter.say(News::Point(index, settings, result));
        });
    Ok(if stop.asked() {
        Ended::Cancelled
    } else {
        Ended::Done
    })
}
