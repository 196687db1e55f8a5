//! The memory balloon.

use std::time::Duration;

use firn_vmm::{BalloonConfig, BalloonStatistics};
use serde_json::{Value, json};

use super::{Controller, call};
use crate::config::{Balloon, BalloonStatisticsUpdate, BalloonUpdate, ValueError};
use crate::fault::Fault;

/// Pages of 4096 bytes in a MiB.
const PAGES_PER_MIB: u32 = 256;

impl Controller {
    pub(super) fn put_balloon(&mut self, balloon: Balloon) -> Result<(), Fault> {
        if balloon.free_page_hinting {
            let reason = "use free_page_reporting";
            return Err(ValueError::unsupported("free_page_hinting", reason).into());
        }
        self.config.balloon = Some(balloon);
        Ok(())
    }

    /// The balloon's configuration.
    pub(super) fn balloon(&self) -> Result<&Balloon, Fault> {
        self.config.balloon.as_ref().ok_or_else(|| Fault::new("the microVM has no balloon"))
    }

    /// The balloon of the guest that boots.
    pub(super) fn guest_balloon(&self) -> Result<Option<BalloonConfig>, Fault> {
        let Some(balloon) = &self.config.balloon else { return Ok(None) };
        Ok(Some(BalloonConfig {
            target: self.pages(balloon.amount_mib)?,
            deflate_on_oom: balloon.deflate_on_oom,
            statistics: period(balloon).is_some(),
            reporting: balloon.free_page_reporting,
        }))
    }

    /// The number of pages of a size, which is at most guest memory.
    fn pages(&self, amount_mib: u32) -> Result<u32, ValueError> {
        let memory = self.config.machine_config.mem_size_mib;
        let pages = amount_mib.checked_mul(PAGES_PER_MIB);
        pages.filter(|_| u64::from(amount_mib) <= memory).ok_or_else(|| {
            ValueError::invalid("amount_mib", format!("the guest has {memory} MiB of memory"))
        })
    }

    pub(super) fn resize_balloon(&mut self, update: BalloonUpdate) -> Result<(), Fault> {
        let (running, balloon) = (self.running()?, *self.balloon()?);
        let BalloonUpdate { amount_mib } = update;
        let target = self.pages(amount_mib)?;
        call(&running.handle, move |microvm| microvm.set_balloon_target(target))??;
        self.config.balloon = Some(Balloon { amount_mib, ..balloon });
        Ok(())
    }

    pub(super) fn balloon_statistics(&self) -> Result<Value, Fault> {
        let running = self.running()?;
        self.balloon()?;
        let told = call(&running.handle, |microvm| microvm.balloon_statistics())??;
        let BalloonStatistics { target_pages, actual_pages, .. } = told;
        let mut answer = json!({
            "target_pages": target_pages,
            "actual_pages": actual_pages,
            "target_mib": target_pages / PAGES_PER_MIB,
            "actual_mib": actual_pages / PAGES_PER_MIB,
        });
        for (name, value) in told.values() {
            answer[name] = value.into();
        }
        Ok(answer)
    }

    pub(super) fn set_statistics_period(
        &mut self,
        update: BalloonStatisticsUpdate,
    ) -> Result<(), Fault> {
        let (running, old) = (self.running()?, *self.balloon()?);
        let BalloonStatisticsUpdate { stats_polling_interval_s } = update;
        let balloon = Balloon { stats_polling_interval_s, ..old };
        if period(&old).is_some() != period(&balloon).is_some() {
            let reason = "statistics are enabled before the boot, and stay as they are";
            return Err(ValueError::invalid("stats_polling_interval_s", reason).into());
        }
        if let Some(period) = period(&balloon) {
            call(&running.handle, move |microvm| microvm.set_balloon_period(Some(period)))??;
        }
        self.config.balloon = Some(balloon);
        Ok(())
    }
}

/// The time after which the guest tells its statistics again, if it has any.
pub(super) fn period(balloon: &Balloon) -> Option<Duration> {
    let seconds = balloon.stats_polling_interval_s;
    (seconds != 0).then(|| Duration::from_secs(seconds.into()))
}
