//! What callers read about the engine's state: metrics, page statistics, and the page audit of tests.

use std::sync::{Arc, Mutex, PoisonError};

use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::LanguageModel;

use super::Engine;
use crate::{Metrics, PageStatistics};

impl<M: LanguageModel> Engine<M> {
    /// The engine in numbers.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The same as of the latest call that has ended: to be read beside a step that runs.
    pub fn published_metrics(&self) -> Arc<Mutex<Metrics>> {
        Arc::clone(&self.published)
    }

    /// How the pages of each group of layers are used.
    pub fn page_statistics(&self) -> Vec<PageStatistics> {
        self.scheduler.pages.statistics()
    }

    /// Checks that every page is accounted for. Takes time in proportion to the pages: for tests.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit_pages(&self) -> Result<(), String> {
        self.scheduler.pages.audit(self.scheduler.sequences().map(|sequence| &sequence.tables))?;
        self.speculator.audit(|id| self.scheduler.sequences().any(|sequence| sequence.id == id))
    }

    pub(crate) fn publish(&mut self) {
        let Self { metrics, scheduler, published, .. } = self;
        (metrics.running, metrics.waiting) = scheduler.requests();
        metrics.preemptions = scheduler.preemptions;
        metrics.prefix_queries_tokens = scheduler.prefix_queries;
        metrics.prefix_hits_tokens = scheduler.prefix_hits;
        metrics.record_pages(&scheduler.pages.statistics());
        if let Some(disk) = scheduler.pages.disk_statistics() {
            metrics.disk_hits_tokens = disk.hits * PAGE_TOKENS as u64;
            metrics.disk_stored_bytes = disk.bytes;
        }
        published.lock().unwrap_or_else(PoisonError::into_inner).clone_from(metrics);
    }
}
