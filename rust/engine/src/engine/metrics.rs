//! Engine state for callers: metrics, page statistics, and the page audit of tests.

use std::sync::{Arc, Mutex, PoisonError};

use ferrule_model::LanguageModel;

use super::Engine;
use crate::{Metrics, PageStatistics};

impl<M: LanguageModel> Engine<M> {
    /// Returns the engine's metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns a shared copy of the metrics, updated at the end of each call. It can be read while a step runs.
    pub fn published_metrics(&self) -> Arc<Mutex<Metrics>> {
        Arc::clone(&self.published)
    }

    /// Returns the page usage of each group of layers.
    pub fn page_statistics(&self) -> Vec<PageStatistics> {
        self.scheduler.kv_cache.statistics()
    }

    /// Checks the reference counts of all pages. Takes time proportional to the number of pages; meant for tests.
    ///
    /// # Errors
    /// Returns a description of the first inconsistency.
    pub fn audit_pages(&self) -> Result<(), String> {
        self.scheduler.kv_cache.audit(self.scheduler.sequences().map(|sequence| &sequence.tables))?;
        self.speculator.audit(|id| self.scheduler.sequences().any(|sequence| sequence.id == id))
    }

    /// Updates the gauges and copies the metrics to the shared copy.
    pub(crate) fn publish(&mut self) {
        let Self { metrics, scheduler, published, .. } = self;
        (metrics.running, metrics.waiting) = scheduler.requests();
        metrics.preemptions = scheduler.preemptions;
        metrics.prefix_queries_tokens = scheduler.prefix_queries;
        metrics.prefix_hits_tokens = scheduler.prefix_hits;
        metrics.record_pages(&scheduler.kv_cache.statistics());
        if let Some(disk) = scheduler.kv_cache.disk_statistics() {
            metrics.disk_hits_tokens = scheduler.kv_cache.tokens_from_disk();
            metrics.disk_stored_bytes = disk.bytes;
        }
        published.lock().unwrap_or_else(PoisonError::into_inner).clone_from(metrics);
    }
}
