{{/* Shoal's configuration as a Serve configuration file: the same applications that
cluster/applications.py makes of it (a test compares them), and where ingresses run. Whole numbers
stay whole through toYaml; printed by themselves they would not (8.388608e+06). */}}
{{- define "shoal.serveConfig" -}}
{{- $config := set (deepCopy .Values.config) "cluster_secret_file" (include "shoal.secretFile" .) -}}
{{- $ingress := $config.ingress | default dict -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ include "shoal.httpPort" . }}
applications:
  - name: ingress
    route_prefix: /
    import_path: cluster.applications:ingress
    args:
      {{- include "shoal.commonArgs" . | nindent 6 }}
    {{- include "shoal.logging" . | nindent 4 }}
    deployments:
      - name: Ingress
        num_replicas: {{ $ingress.replicas | default 1 | int64 }}
        ray_actor_options:
          num_cpus: 1
          label_selector:
            shoal/pool: ingress
        user_config:
          config:
            {{- toYaml $config | nindent 12 }}
  {{- range $model := $config.models }}
  - name: engine-{{ $model.name | replace "/" "%2f" | replace ":" "%3a" | replace "@" "%40" | replace "+" "%2b" }}
    route_prefix: null
    import_path: cluster.applications:engine
    args:
      {{- include "shoal.commonArgs" $ | nindent 6 }}
      model:
        {{- include "shoal.identity" $model | nindent 8 }}
    {{- include "shoal.logging" . | nindent 4 }}
    deployments:
      - name: Supervisor
        {{- $least := $model.replicas | default 1 | int64 }}
        {{- /* Of a fixed number too: to give a deployment a policy would restart it. */}}
        autoscaling_config:
          min_replicas: {{ $least }}
          max_replicas: {{ dig "autoscaling" "max_replicas" $least $model | default $least | int64 }}
          metrics_interval_s: 0.5
          look_back_period_s: 1.0
          upscale_delay_s: 0
          downscale_delay_s: 0
          policy:
            policy_function: autoscaler.policy:BacklogPolicy
        user_config:
          {{- include "shoal.live" $model | nindent 10 }}
  {{- end }}
{{- end -}}

{{- define "shoal.logging" -}}
logging_config:
  log_level: WARNING
  enable_access_log: false
{{- end -}}

{{- define "shoal.commonArgs" -}}
cluster_secret_file: {{ include "shoal.secretFile" . }}
registry:
  {{- .Values.config.registry | default dict | toYaml | nindent 2 }}
{{- end -}}

{{/* A model without what may change while its engines run: Serve restarts them, and no others, when
anything of this does. */}}
{{- define "shoal.identity" -}}
{{- $identity := omit . "aliases" "replicas" "supervision" "autoscaling" -}}
{{- with .engine -}}
  {{- $_ := set $identity "engine" (omit . "scheduler") -}}
{{- end -}}
{{- toYaml $identity -}}
{{- end -}}

{{/* What may change while they run, alone. */}}
{{- define "shoal.live" -}}
{{- $live := pick . "aliases" "supervision" "autoscaling" -}}
{{- with (.engine | default dict).scheduler -}}
  {{- $_ := set $live "engine" (dict "scheduler" .) -}}
{{- end -}}
{{- toYaml $live -}}
{{- end -}}
